import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ablations"))  # where `python ablations/NAME.py` finds its siblings
