// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package ucx

import "strconv"

func load(string) (reason, fix string) {
	return "this program was built without cgo", "build it with CGO_ENABLED=1 and gcc"
}

// Native says whether there is any C.
const Native = false

// Version names the library that Load has opened, as in "1.13.1".
func Version() string { return "" }

// Kept is 0.
func Kept() int { return 0 }

// Spots needs cgo.
type Spots struct{}

func statusText(status int32) string { return strconv.Itoa(int(status)) }
