// SPDX-License-Identifier: Apache-2.0

package plot

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestDraw: each kind of report becomes a picture that names its lines.
func TestDraw(t *testing.T) {
	if err := Check(t.Context(), "python3"); err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "plot",
			Reason: err.Error(), Fix: "pip install matplotlib"})
	}
	recorded, err := os.ReadFile("../peers/testdata/recorded.json")
	require.NoError(t, err)
	sweep := Sweep{Title: "A machine & more"}
	for _, size := range []uint64{64, 4096} {
		r := bench.Result{Backend: "tcp", Op: "read", Size: size, GBps: 1, P50us: 2}
		r.SetBaselines([]bench.Baseline{{Name: bench.SocketsName, GBps: 3, P50us: 4}})
		sweep.Results = append(sweep.Results, r)
	}
	for name, c := range map[string]struct {
		report any
		want   []string
	}{
		"peers": {json.RawMessage(recorded), []string{"sluice-tcp",
			"TCP over the loopback: write (higher is better)"}},
		"sweep": {sweep, []string{"tcp: read (higher is better)", bench.SocketsName, "4 KiB",
			"A machine &amp; more"}},
	} {
		file := filepath.Join(t.TempDir(), name+".svg")
		require.NoError(t, Draw(t.Context(), "python3", c.report, file))
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, want := range c.want {
			// a comment stands above the outlines of each text
			require.True(t, strings.Contains(string(text), "<!-- "+want), want)
		}
	}
	err = Draw(t.Context(), "python3", Sweep{}, filepath.Join(t.TempDir(), "empty.svg"))
	require.ErrorContains(t, err, "empty.svg: exit status 1: TypeError")
}

func TestWithoutTheLibrary(t *testing.T) {
	require.ErrorContains(t, Check(t.Context(), "/no/python"), "pip install matplotlib")
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	require.ErrorIs(t, Check(ctx, "/no/python"), cause)
	require.ErrorIs(t, Draw(ctx, "/no/python", Sweep{}, "a.svg"), cause)
	require.ErrorContains(t, Named("a.jpg"), ".svg or .png")
	require.NoError(t, Named("dir.x/a.png"))
}
