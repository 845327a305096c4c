"""Compressed communication for tensor-parallel training in JAX.

Swap `jax.lax.psum` for `taco_jax.psum`: same values and gradients within the codec's error, half the bytes or fewer.
"""

from taco_jax.codec import round_trip as round_trip
from taco_jax.codec import snr_db as snr_db
from taco_jax.collectives import all_gather as all_gather
from taco_jax.collectives import all_to_all as all_to_all
from taco_jax.collectives import pmean as pmean
from taco_jax.collectives import ppermute as ppermute
from taco_jax.collectives import psum as psum
from taco_jax.collectives import psum_scatter as psum_scatter
from taco_jax.collectives import pvary as pvary
from taco_jax.collectives import save_payloads as save_payloads
from taco_jax.config import PRESETS as PRESETS
from taco_jax.config import Codec as Codec
from taco_jax.config import Compression as Compression
from taco_jax.scales import SitePair as SitePair
from taco_jax.scales import init_scales as init_scales
from taco_jax.scales import split_scales as split_scales
from taco_jax.scales import update_scales as update_scales
from taco_jax.sharding.tensor_parallel import column_parallel as column_parallel
from taco_jax.sharding.tensor_parallel import row_parallel as row_parallel
from taco_jax.wire import wire_bytes as wire_bytes
