// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/csrc/nvml"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/topology"
)

// TestReportOfAServer: the list of devices, with slow links, stands behind the checks.
func TestReportOfAServer(t *testing.T) {
	kernel := topology.Sysfs(standin.ServerSysfs(t).Root)
	devices := machine.ExamineDevices(kernel, func() (nvml.Findings, error) {
		return nvml.Findings{}, &driver.UnavailableError{Backend: "nvml", Reason: "not asked"}
	})
	s := machine.Source{Root: t.TempDir(),
		Backends: []machine.Backend{{Name: "tcp", Built: true}, {Name: "cuda", Built: true}}}
	r := machine.Examine(s)
	var out strings.Builder
	require.NoError(t, printReport(&out, &r, &devices))
	for _, want := range []string{
		`\nDEVICES \(NVML: not asked\)\nGPU 0, `,
		`\n  near: NIC mlx5_0 \(same switch\); drive nvme0 \(same switch\)\n`,
		`\n  ! mlx5_1 runs at Gen4 x16 of Gen5 x16: move it to a slot of Gen5 x16`,
	} {
		require.Regexp(t, want, out.String())
	}
}
