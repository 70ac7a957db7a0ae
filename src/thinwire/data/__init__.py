"""Which samples a rank reads, and in which order. `shards` reads datasets with an index, `streams` those without."""

from thinwire.data.shards import Batch as Batch
from thinwire.data.shards import Loader as Loader
from thinwire.data.shards import Shard as Shard
from thinwire.data.shards import derive_seed as derive_seed
from thinwire.data.shards import num_samples as num_samples
from thinwire.data.shards import to_device as to_device
from thinwire.data.shards import two_tensors as two_tensors
from thinwire.data.streams import StreamLoader as StreamLoader
from thinwire.data.streams import loader as loader
