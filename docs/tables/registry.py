"""All tables and the pictures above them, by the name of their result."""

from __future__ import annotations

from tables import changes, cluster, doors, engine, faults, gpu, kv, others, papers, plans, predictions
from tables.shape import Tables

TABLES: Tables = {
    **changes.TABLES,
    **cluster.TABLES,
    **doors.TABLES,
    **engine.TABLES,
    **faults.TABLES,
    **gpu.TABLES,
    **kv.TABLES,
    **others.TABLES,
    **papers.TABLES,
    **plans.TABLES,
    **predictions.TABLES,
}
PICTURES = {  # what each shows, for who does not see it
    **changes.PICTURES,
    **cluster.PICTURES,
    **doors.PICTURES,
    **faults.PICTURES,
    **kv.PICTURES,
    **others.PICTURES,
    **papers.PICTURES,
    **plans.PICTURES,
    **predictions.PICTURES,
}
