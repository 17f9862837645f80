// SPDX-License-Identifier: Apache-2.0

// Package examples holds small whole programs to copy from, in Go, C and Python; README.md lists
// them. Its tests build and run them.
package examples
