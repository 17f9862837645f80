// SPDX-License-Identifier: Apache-2.0

package main

import "runtime/debug"

// version is set by the linker for releases (-X main.version=v1.2.3).
var version = ""

// readVersion returns the version that the linker has set or, if it has not, the one that the go
// command has recorded in the binary.
func readVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok && version == "" {
		return info.Main.Version
	}
	return version
}
