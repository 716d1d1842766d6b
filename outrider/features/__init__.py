"""Features: each folder is one, and imports the core but no other feature. `outrider/feature_list.py` names them."""
