"""Training for a quantized model, and training in low precision::

    plan = prepare_(model, "int4-g32")                  # layers compute with rounded weights, floats are trained
    ...                                                 # train as usual
    report = convert_(model)                            # the quantized model, with the numbers it was trained with

    quantize_(model, "int3", algorithm="gptq", ..)      # or load() a model that is already quantized
    learn_scales_(model)                                # only its scales are trained; codes stay
    ...
    convert_(model)

    prepare_(model, "fp8-row", gradients="fp8-row")     # both passes in low precision
    ...
    release_(model)                                     # the float model again

docs/training.md explains each of them.
"""

from bitport.train import aten, fsdp, functions  # noqa: F401  (fill TrainedTensor's tables)
from bitport.train.gradients import GRADIENTS, Gradients
from bitport.train.prepare import convert_, prepare_, release_
from bitport.train.scales import learn_scales_
from bitport.train.tensor import TrainedTensor

__all__ = ["GRADIENTS", "Gradients", "TrainedTensor", "convert_", "learn_scales_", "prepare_", "release_"]
