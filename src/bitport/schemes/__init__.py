"""Schemes by name, recipes that assign them to a model's weights, and the plan a recipe resolves to."""

from bitport.schemes.plan import Choice, Plan
from bitport.schemes.presets import PRESETS, preset
from bitport.schemes.recipe import Recipe, RecipeLike, Rule
from bitport.schemes.scheme import Scheme
from bitport.schemes.target import KINDS, Target

__all__ = ["KINDS", "PRESETS", "Choice", "Plan", "Recipe", "RecipeLike", "Rule", "Scheme", "Target", "preset"]
