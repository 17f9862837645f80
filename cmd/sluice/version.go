// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the linker for releases (-X main.version=v1.2.3).
var version = ""

type versionOutput struct {
	Version  string `json:"version"`
	Revision string `json:"revision"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func newVersion() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			v := readVersion()
			if asJSON {
				return printJSON(c.OutOrStdout(), v)
			}
			if _, err := fmt.Fprintf(c.OutOrStdout(), "sluice %s (%s, %s)\n", v.Version, v.Go,
				v.Platform); err != nil {
				return fmt.Errorf("write version: %w", err)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// readVersion asks what the go command left in the binary.
func readVersion() versionOutput {
	v := versionOutput{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" +
		runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	if v.Version == "" {
		v.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			v.Revision = s.Value
		}
	}
	return v
}
