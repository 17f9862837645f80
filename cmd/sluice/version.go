// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/backends/byname"
)

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

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Say which version, commit and build this is",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			settings := map[string]string{}
			if info, ok := debug.ReadBuildInfo(); ok {
				for _, s := range info.Settings {
					settings[s.Key] = s.Value
				}
			}
			commit := cmp.Or(settings["vcs.revision"], "unknown")
			if settings["vcs.modified"] == "true" {
				commit += ", with changes"
			}
			var backends []string
			for _, b := range byname.All() {
				if isBuilt(b) {
					backends = append(backends, b.Name)
				}
			}
			_, err := fmt.Fprintf(c.OutOrStdout(), "version  %s\ncommit   %s\nbuilt    %s, %s/%s\n"+
				"backends %s\n", readVersion(), commit, runtime.Version(), runtime.GOOS,
				runtime.GOARCH, strings.Join(backends, ", "))
			if err != nil {
				return fmt.Errorf("write: %w", err)
			}
			return nil
		},
	}
}
