"""The scheme, recipe and plan in the frozen files, with a value in every field."""

from __future__ import annotations

from bitport.numerics import Format
from bitport.schemes import Choice, Plan, Recipe, Rule, Scheme

SCHEME = Scheme(
    weight=Format(dtype="float4_e2m1", block=(1, 16), scale="e4m3", global_scale=True), act="nvfp4", static=True
)
INT4 = Scheme(weight=Format(dtype="int4", block=(1, 32), zero="int", scale="input"))
MX = Scheme(weight=Format(dtype="float6_e3m2", block=(1, 32), scale="e8m0", scale_rule="ceil"), act="mxfp8")
RECIPE = Recipe((Rule("lm_head", "skip"), Rule(r"re:.*\.mlp\..*", INT4), Rule("*", MX, ("linear", "attention"))))
PLAN = Plan((Choice("lm_head.weight", None, "rule 'lm_head' says skip"), Choice("up.weight", INT4, "rule 'up'")))
