// SPDX-License-Identifier: Apache-2.0

package main

import "runtime/debug"

// version is set by the linker for releases (-X main.version=v1.2.3).
var version = ""

// readVersion asks what the go command left in the binary, where the linker has set none.
func readVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok && version == "" {
		return info.Main.Version
	}
	return version
}
