# SPDX-License-Identifier: Apache-2.0
"""The core: sharded parameters, units, gathering, reducing and stepping.

Data flows through the files in this order: ``param`` (what is sharded), ``unit`` (what is gathered together),
``partition`` (which modules become units), ``fetch`` (gather, prefetch, release), ``grads`` (reduce), ``master``
(step and write back). Nothing here imports the glue or the public face.
"""
