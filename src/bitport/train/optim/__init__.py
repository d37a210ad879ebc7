"""The optimizers of torch.optim with ``states=``, which reduces the memory of their state to a quarter or an eighth."""

from bitport.train.optim.adam import Adam, AdamW
from bitport.train.optim.base import LowBitOptimizer
from bitport.train.optim.lion import Lion
from bitport.train.optim.sgd import SGD
from bitport.train.optim.states import STATES

__all__ = ["SGD", "STATES", "Adam", "AdamW", "Lion", "LowBitOptimizer"]
