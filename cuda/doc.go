// SPDX-License-Identifier: Apache-2.0

// Package cuda moves scattered entries that are too small for a copy engine: the 656 bytes
// that DeepSeek-V3.2 keeps for a token, 2,048 of them for a step.
//
// gather.cu is the kernel, in two variants: through registers, and by asynchronous copies through
// shared memory, both for any card from sm_80 on, and in a third for nests of loops. They are
// embedded as PTX, which the driver compiles. Kernels has their launches for a caller with streams
// of its own, as backends/cuda is; Device launches on a stream of its own and waits. Which variant
// serves a Move within a Budget is planned from its entries (plan.go).
//
// The twin does the same on the CPU: Run takes the same Move, leaves out what the kernel leaves out
// and counts it as the kernel does. Tests run the kernels' source on the CPU under
// sanitizers, launch it through a software stand-in of the driver, and assemble the PTX where there
// is a ptxas; hack/gpu-check runs them on a card (bench/results has what came out).
//
// Summer digests cells of KV cache in a card's memory: the kernel of digest.cu has the sums of
// package csrc/digest, its twin on the CPU.
//
// Everything here builds with CGO_ENABLED=0; the twin is then a plain loop, and no Device opens.
package cuda
