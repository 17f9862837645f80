// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/csrc/copy"
)

func TestBenchCopyJSON(t *testing.T) {
	o := ok(t, sluice(t, "bench", "copy", "--rounds", "1", "--seconds", "0.001",
		"--bytes", "2MiB", "--json"))
	list := decode(t, o.stdout).([]any)
	require.Len(t, list, len(bench.CopyShapes(2<<20)))
	first := list[0].(map[string]any)
	require.Len(t, first["notes"], 2)
	require.Contains(t, first["notes"], "sluice doctor --tune FILE measures longer")
	delete(first, "notes")
	wantKeys(t, "result", first, benchKeys...)
	require.Len(t, first["baselines"], 1+len(copy.Variants()))
	for want, args := range map[string][]string{"--seconds 0": {"--seconds", "0"},
		"--bytes much": {"--bytes", "much"}, "want more than 1MiB": {"--bytes", "1MiB"},
		"--bytes 1TiB": {"--bytes", "1TiB"}} {
		o := sluice(t, append([]string{"bench", "copy"}, args...)...)
		require.Equal(t, statusUsage, o.status)
		require.Contains(t, o.stderr, want)
	}
}

func TestDoctorSaysTheCopy(t *testing.T) {
	require.Regexp(t, `\nhost-copy +ok +\w`, ok(t, sluice(t, "doctor")).stdout)
}
