"""Several engines of one model behind one front: in threads of this process, or in actors of Ray."""

from jkv.replicas.replicas import Replicas as Replicas
