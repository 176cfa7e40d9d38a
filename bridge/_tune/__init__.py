"""``swa tune``: measures what plans cost on this GPU and stores it for the planner of both frameworks.

``sample`` says which plans, ``measure`` takes their times (the only part that needs a GPU, torch and Triton), ``fit``
turns times into costs, ``tuning`` runs the three and judges whether the new costs choose better plans, and ``device``
knows which GPU this is. Storing and looking up is ``swa_plan``'s, because its planner reads the profile.
"""
