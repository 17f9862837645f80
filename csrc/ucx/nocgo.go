// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package ucx

import "strconv"

func load(string) (reason, fix string) {
	return "this program was built without cgo", "build it with CGO_ENABLED=1 and gcc"
}

// Version names the library that Load has opened, as in "1.13.1".
func Version() string { return "" }

func statusText(status int32) string { return strconv.Itoa(int(status)) }
