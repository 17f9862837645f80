// SPDX-License-Identifier: Apache-2.0

// Package testkit has what tests of this module share.
//
//   - CheckLeaks fails a test that leaves descriptors, goroutines or memory behind.
//   - FatalBroken and ErrorBroken tell a broken promise apart from a test that was late.
//   - InVirtualTime runs a test where time passes only while every goroutine waits; Clock is a
//     clock that the test moves.
//   - Freeze stops a child process, WithholdPages takes pages of memory away, OneSideSees runs two
//     sides at the same instant.
//   - AllocsPerRun counts allocations. Authority issues certificates.
package testkit
