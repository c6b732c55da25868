"""The table of policies: each line enters one recipe. A new policy is its own file and one line here.

`jkv` and `jkv.policies` take all names of this module (`import *`), so it holds nothing but recipes. Plain import statements,
rather than names made at run time, are what type checkers and editors understand; `x as x` marks a name as exported.
"""

from jkv.policies.ada_kv import ada_kv as ada_kv
from jkv.policies.ams import ams as ams
from jkv.policies.caote import caote as caote
from jkv.policies.critical_kv import critical_kv as critical_kv
from jkv.policies.cur import cur as cur
from jkv.policies.expected_attention import expected_attention as expected_attention
from jkv.policies.foresight import foresight as foresight
from jkv.policies.full import full as full
from jkv.policies.g_kv import g_kv as g_kv
from jkv.policies.h2o import h2o as h2o
from jkv.policies.key_diff import key_diff as key_diff
from jkv.policies.lag_kv import lag_kv as lag_kv
from jkv.policies.learned_gate import learned_gate as learned_gate
from jkv.policies.mem_share import mem_share as mem_share
from jkv.policies.pyramid_kv import pyramid_kv as pyramid_kv
from jkv.policies.quest import quest as quest
from jkv.policies.r_kv import r_kv as r_kv
from jkv.policies.random import random as random
from jkv.policies.random_attention import random_attention as random_attention
from jkv.policies.random_share import random_share as random_share
from jkv.policies.reason_cache import reason_cache as reason_cache
from jkv.policies.rpc import rpc as rpc
from jkv.policies.seal import seal as seal
from jkv.policies.skip_kv import skip_kv as skip_kv
from jkv.policies.snap_kv import snap_kv as snap_kv
from jkv.policies.streaming_llm import streaming_llm as streaming_llm
from jkv.policies.tova import tova as tova
from jkv.policies.tri_attention import tri_attention as tri_attention
from jkv.policies.twin_kv import twin_kv as twin_kv
from jkv.policies.vase import vase as vase
