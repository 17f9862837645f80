// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package ucx

// Native says whether there is any C.
const Native = false
