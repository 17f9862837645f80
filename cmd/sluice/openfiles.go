// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// openFilesMin is how many files a process must be allowed to open: with fewer, connections end
// in the middle of a handshake, and libraries that are opened at run time end the process.
const openFilesMin = 64

// needsFiles tells commands that open backends.
func needsFiles(c *cobra.Command) bool {
	for ; c.HasParent(); c = c.Parent() {
		switch c.Name() {
		case "agent", "ls", "get", "put", "bench", "replay", "load", "explain", "peer":
			return true
		}
	}
	return false
}

// checkOpenFiles refuses to begin what would fail half-way.
func checkOpenFiles(c *cobra.Command, _ []string) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur >= openFilesMin ||
		!needsFiles(c) {
		return nil
	}
	return fmt.Errorf("this process may open %d files, and needs %d: raise the limit (ulimit -n "+
		"%d; services: LimitNOFILE; containers: --ulimit nofile=1024)",
		limit.Cur, openFilesMin, 16*openFilesMin)
}
