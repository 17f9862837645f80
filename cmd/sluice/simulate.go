// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/spf13/cobra"

func newSimulate() *cobra.Command {
	c := &cobra.Command{
		Use:   "simulate",
		Short: "Say what a part would do on hardware that is not here",
		Args:  noArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newSimulateSparse(), newSimulateTrace())
	return c
}
