"""Everything that has a name: strategies, reducers, heads, tasks, models, optimizers and schedules.

`table` has the names, `lookup` finds what they name, `building` makes it from a spec, and `listing` describes it. `own`
loads what is the user's.
To add a method: write its module, add one line to `table.TABLE`, add one test file.
"""

from thinwire.registry.building import bind_options as bind_options
from thinwire.registry.building import build as build
from thinwire.registry.building import check as check
from thinwire.registry.building import strategies_in as strategies_in
from thinwire.registry.listing import Entry as Entry
from thinwire.registry.listing import Option as Option
from thinwire.registry.listing import describe as describe
from thinwire.registry.lookup import find as find
from thinwire.registry.lookup import import_attribute as import_attribute
from thinwire.registry.lookup import kind_of as kind_of
from thinwire.registry.lookup import load as load
from thinwire.registry.own import check_own_name as check_own_name
from thinwire.registry.own import is_own as is_own
from thinwire.registry.own import load_own as load_own
from thinwire.registry.table import SINGULAR as SINGULAR
from thinwire.registry.table import TABLE as TABLE
