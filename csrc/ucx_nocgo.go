// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

func loadUCX(string) (reason, fix string) {
	return "this program was built without cgo", "build it with CGO_ENABLED=1 and gcc"
}

// UCXVersion names the library that LoadUCX has opened, as in "1.13.1".
func UCXVersion() string { return "" }
