// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
)

// needsFiles tells commands that open backends.
func needsFiles(c *cobra.Command) bool {
	for ; c.HasParent(); c = c.Parent() {
		switch c.Name() {
		case "bench", "replay", "load", "explain", "peer":
			return true
		}
	}
	return false
}

// openFilesLimit is how many files this process may open. few: too few to open backends.
func openFilesLimit() (n uint64, few bool) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, false
	}
	return limit.Cur, limit.Cur < machine.OpenFilesMin
}

// checkOpenFiles refuses to begin what would fail half-way.
func checkOpenFiles(c *cobra.Command, _ []string) error {
	n, few := openFilesLimit()
	if !few || !needsFiles(c) {
		return nil
	}
	return fmt.Errorf("this process may open %d files, and needs %d: raise the limit (ulimit -n "+
		"%d; services: LimitNOFILE; containers: --ulimit nofile=1024)",
		n, machine.OpenFilesMin, 16*machine.OpenFilesMin)
}
