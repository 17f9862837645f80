// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/csrc/copy"
)

func TestBenchCopyJSON(t *testing.T) {
	o := ok(t, sluice(t, "bench", "copy", "--rounds", "1", "--json"))
	list := decode(t, o.stdout).([]any)
	require.Len(t, list, len(bench.CopyShapes()))
	first := list[0].(map[string]any)
	require.Len(t, first["notes"], 1)
	delete(first, "notes")
	wantKeys(t, "result", first, benchKeys...)
	require.Len(t, first["baselines"], 1+len(copy.Variants()))
	require.Equal(t, 2, sluice(t, "bench", "copy", "--seconds", "0").status)
}

func TestDoctorSaysTheCopy(t *testing.T) {
	require.Regexp(t, `\nhost-copy +ok +\w`, ok(t, sluice(t, "doctor")).stdout)
}
