// SPDX-License-Identifier: Apache-2.0

// Package bench measures transfers beside the plain way to move the same
// pieces: memcpy by the same number of threads, and process_vm_writev where
// that is an answer. A ratio is the result; an absolute figure is an
// illustration.
//
// Transfers and baselines alternate in short slices of one run, so that a noisy
// machine is noisy for both, and what is reported is the median of the slices.
// The pieces of a batch never lie side by side on both ends: an engine that
// merges neighbours would otherwise be measured with one long copy.
package bench
