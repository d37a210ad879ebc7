"""How good a model is: perplexity, size and speed, of one model or of one per scheme."""

from bitport.evaluate.perplexity import Perplexity, perplexity

__all__ = ["Perplexity", "perplexity"]
