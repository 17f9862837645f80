// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench/drivers"
)

// newBenchDriver is one end of a participant, as the harness starts it: it speaks on descriptors 3
// and 4.
func newBenchDriver() *cobra.Command {
	return &cobra.Command{
		Use:                "driver NAME [ARGS]",
		Short:              "One end of what is measured, for the harness",
		Hidden:             true,
		DisableFlagParsing: true,
		Args:               cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return drivers.Run(c.Context(), args[0], args[1:])
		},
	}
}
