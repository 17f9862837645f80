// SPDX-License-Identifier: Apache-2.0

// Package cuda moves scattered entries that are too small for a copy engine: the 656 bytes
// that DeepSeek-V3.2 keeps for a token, 2,048 of them for a step.
//
// gather.cu is the kernel, in two variants: through registers, and by asynchronous copies through
// shared memory, both for any card from sm_80 on, and in a third for nests of loops. They are
// embedded as PTX, which the driver compiles. Kernels has their launches for a caller with streams
// of its own, as backends/cuda is. Which variant moves a Pattern within a Budget is planned from
// its entries (plan.go). The kernels also take what no Pattern has: a second part, and wide
// indices.
//
// Tests run the kernels' source on the CPU under sanitizers, launch it through a software stand-in
// of the driver, and assemble the PTX where there is a ptxas; hack/gpu-check runs the kernels on a
// card (bench/results has the figures).
//
// Summer digests cells of KV cache in a card's memory: the kernel of digest.cu has the sums of
// package csrc/digest, which computes them on the CPU.
//
// The kernels of sparse.cu look entries of sparse attention up as package csrc/sparse does on the
// CPU, with tables and batches in a card's memory. Nothing but tests launches them yet.
//
// The argument structs are those of gather.h, digest.h and sparse.h, which the kernels include;
// layout_unsafe.go compares them with Go's. Everything here builds with CGO_ENABLED=0, but no
// Summer opens then.
package cuda
