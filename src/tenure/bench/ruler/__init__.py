"""``tenure bench ruler``: what compressed contexts still answer, in the task families of RULER (arXiv 2404.06654)."""
