// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

func loadVerbs(string) (reason, fix string) {
	return "this program was built without cgo", "build it with CGO_ENABLED=1 and gcc"
}

func countVerbs() (n int, why string) { return 0, "ENOSYS" }
