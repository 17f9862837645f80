// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// TestHelpExamples: the flags and words of each command that a help text shows are known. They are
// not run here, as most need certificates, other machines or devices; TestDocumentedCommands runs
// those that stand in a document.
func TestHelpExamples(t *testing.T) {
	shown := 0
	for _, c := range commands(newRoot()) {
		for line := range strings.Lines(c.Example) {
			_, words, found := strings.Cut(line, "sluice ")
			require.True(t, found, "%s: %s", c.CommandPath(), line)
			words, _, _ = strings.Cut(words, " | ")
			out, err := exec.Command("sh", "-fc", `printf '%s\0' `+words).Output()
			require.NoError(t, err)
			args := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
			of, rest, err := newRoot().Find(args)
			require.NoError(t, err, line)
			require.True(t, strings.HasPrefix(of.CommandPath(), "sluice "), line)
			require.NoError(t, of.ParseFlags(rest), line)
			require.NoError(t, of.ValidateArgs(of.Flags().Args()), line)
			shown++
		}
	}
	require.Greater(t, shown, 15)
}

// commands lists a command and all below it.
func commands(c *cobra.Command) []*cobra.Command {
	list := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		list = append(list, commands(sub)...)
	}
	return list
}
