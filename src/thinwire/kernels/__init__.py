"""What compression does to every element of a vector, made fast.

A vector is cut into scale blocks: elements that share a scale. The last block may be short.
"""

from thinwire.kernels.bits import pack as pack
from thinwire.kernels.bits import unpack as unpack
from thinwire.kernels.dispatch import VERSIONS as VERSIONS
from thinwire.kernels.dispatch import check_choice as check_choice
from thinwire.kernels.formulas import clamp_scales as clamp_scales
from thinwire.kernels.ops import abs_max as abs_max
from thinwire.kernels.ops import all_finite as all_finite
from thinwire.kernels.ops import all_finite_in as all_finite_in
from thinwire.kernels.ops import decode as decode
from thinwire.kernels.ops import decode_mean as decode_mean
from thinwire.kernels.ops import dequantise as dequantise
from thinwire.kernels.ops import encode as encode
from thinwire.kernels.ops import num_blocks as num_blocks
from thinwire.kernels.ops import quantisation_error as quantisation_error
from thinwire.kernels.ops import quantise as quantise
from thinwire.kernels.passes import SCALE_BYTES as SCALE_BYTES
from thinwire.kernels.passes import Layout as Layout
