"""It claims the arrays of another plugin's library, so polyattn finds that one as their owner.

``CROOKED`` has the failures that it declares, as JSON.
"""

import json
import os

from polyattn_strict import StrictBackend


class Crooked(StrictBackend):
    name = "crooked"
    expected_failures = json.loads(os.environ["CROOKED"])


backend = Crooked()
