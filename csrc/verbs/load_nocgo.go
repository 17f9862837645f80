// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package verbs

func loadLibrary(string) (reason, fix string) {
	return "this program was built without cgo", "build it with CGO_ENABLED=1 and gcc"
}

func countDevices() (n int, why string) { return 0, "ENOSYS" }
