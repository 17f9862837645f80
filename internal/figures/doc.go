// SPDX-License-Identifier: Apache-2.0

// Package figures reads and writes sizes, and sums up what was measured.
package figures
