"""From what the model answered to what it was worth.

`answer` holds the verdicts that are pure functions of two texts, `expression` and `gym` those of other packages; `size`
and `tree` say what computing an answer would cost, and `scorers` whose fault it is if one is never done with it.
`parts` turns a part of the recipe into a verdict, `combine` weighs the parts into a `Reward`, `score` judges a step's
trajectories and sorts them into groups. A verdict that could not be made is a failure of ours: it is marked, counted
and dropped, and never becomes a reward of 0.
"""
