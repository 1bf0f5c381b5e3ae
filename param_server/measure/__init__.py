"""How fast a table is, beside what one would use without it: what `trirank bench lookup|apply|topk|stall` runs.

Not part of serving. Every answer that is timed is checked; peers are timed in turns with the table, in one run.
"""
