// SPDX-License-Identifier: Apache-2.0

// Package cuda moves scattered entries that are too small for a copy engine: the 656 bytes
// that DeepSeek-V3.2 keeps for a token, 2,048 of them for a step.
//
// gather.cu is the kernel, in two variants: through registers, and by asynchronous copies through
// shared memory, both for any card from sm_80 on. They are embedded as PTX, which the driver
// compiles; Device loads and launches it. Tests run the same source on the CPU under
// sanitizers, launch it through a software stand-in of the driver, and assemble the PTX where there
// is a ptxas; hack/gpu-check runs them on a card (bench/results has what came out).
//
// The twin does the same on the CPU: Gather, Scatter, Run and Twin take the same Move, leave
// out what the kernel leaves out and count it as the kernel does.
//
// Device.Run performs a Move between the host and a card by one of four variants (Variants): the
// two kernels, the copy engine by a call for each run, or the CPU through a ring of pinned memory,
// which takes no multiprocessor. Which one is fastest is measured when the first Move of
// its kind comes; Explain says what came out, and a name in its place is that variant or an error.
// Prepare captures a launch for replay. Plan says what is known without a card.
//
// Summer digests cells of KV cache in a card's memory: the kernel of digest.cu has the sums of
// package csrc/digest, its twin on the CPU.
//
// Everything here builds with CGO_ENABLED=0; the twin is then a plain loop, and no Device opens.
package cuda
