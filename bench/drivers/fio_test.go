// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

func needFio(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("fio"); err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "fio",
			Reason: err.Error(), Fix: "apt-get install fio"})
	}
}

func TestFioRuns(t *testing.T) {
	needFio(t)
	m := meet(t, bench.File, 1<<20, "fio")
	for _, op := range []string{bench.OpWrite, bench.OpRead, bench.OpDurable} {
		p, err := m.Prepare(op, 656, make([]int32, 5), nil)
		require.NoError(t, err)
		took, err := p.(bench.Measurer).Measure(t.Context())
		require.NoError(t, err, op)
		require.Positive(t, took)
	}
}

func TestFioOutput(t *testing.T) {
	const out = `{"jobs":[{"usr_cpu":10,"write":{"total_ios":0,"runtime":0},
		"read":{"total_ios":8000,"runtime":1000}}]}`
	rate, err := parseFio([]byte(out), "randread")
	require.NoError(t, err)
	require.Equal(t, 8000., rate)
	_, err = parseFio([]byte(out), "randwrite")
	require.ErrorIs(t, err, bench.ErrNonsense)
	for _, bad := range []string{"", "{}", "nonsense", `{"jobs":[{}]}`} {
		_, err := parseFio([]byte(bad), "read")
		require.ErrorIs(t, err, bench.ErrNonsense, bad)
	}
}
