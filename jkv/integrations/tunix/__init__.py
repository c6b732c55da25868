"""jkv as a rollout engine of tunix (extra `tunix`, google-tunix 0.1.7), and a GRPO learner that corrects for compression.

    cluster_config = rl_cluster.ClusterConfig(
        rollout_engine=functools.partial(JkvRollout, policy=jkv.r_kv(budget=512)),
        ...
    )
    learner = JkvGRPOLearner(cluster, GRPOConfig(num_generations=8), reward_fns, correction="tis+veto")

`params_of` converts the weights of a tunix model to `jkv.Params`, for `jkv.generate`, `jkv.score`, `jkv.save` and
`jkv.checkpoints.loading.export`.
"""

from jkv.integrations.tunix.learner import JkvGRPOLearner
from jkv.integrations.tunix.rollout import JkvRollout
from jkv.integrations.tunix.weights import params_of

__all__ = ["JkvGRPOLearner", "JkvRollout", "params_of"]
