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

// TestReportOfAServer: the list of devices stands behind the checks, one of which is a slow link.
func TestReportOfAServer(t *testing.T) {
	kernel := topology.Sysfs(standin.ServerSysfs(t).Root)
	devices := machine.ExamineDevices(kernel, func() (nvml.Findings, error) {
		return nvml.Findings{}, &driver.UnavailableError{Backend: "nvml", Reason: "not asked"}
	})
	s := machine.Source{Root: t.TempDir(), Known: deviceChecks(&devices),
		Backends: []machine.Backend{{Name: "tcp", Built: true}, {Name: "cuda", Built: true}}}
	r := machine.Examine(s)
	var out strings.Builder
	require.NoError(t, printReport(&out, &r, &devices))
	for _, want := range []string{
		`\nDEVICES \(NVML: not asked\)\nGPU 0, `,
		`\n  near: NIC mlx5_0 \(same switch\); drive nvme0 \(same switch\)\n`,
		`\npcie GPU 1 +limited +GPU 1 runs at Gen3 x8 of Gen5 x16\n`,
		`\n  pcie mlx5_1 \(tcp, ucx, rdma\): .*\n +move it to a slot of Gen5 x16`,
		`\ntcp +limited .*pcie mlx5_1: mlx5_1 runs at Gen4 x16 of Gen5 x16`,
	} {
		require.Regexp(t, want, out.String())
	}
}

// TestDeviceChecks lets nothing count against a backend that idleness may explain.
func TestDeviceChecks(t *testing.T) {
	var states []string
	for _, c := range deviceChecks(&machine.Devices{
		GPUs: []*machine.Device{{Kind: "gpu", Name: "GPU 0", Warnings: []machine.Warning{
			{Of: "0000:17:00.0"}, {Of: "GPU 0", Idle: true}}}},
		Others: []*machine.Device{{Kind: "drive", Name: "nvme0",
			Warnings: []machine.Warning{{Of: "nvme0"}}}, {Kind: "nic", Name: "mlx5_0"}},
	}) {
		states = append(states, c.Name+" "+string(c.State)+" "+c.Backends[0])
	}
	require.Equal(t, []string{"pcie 0000:17:00.0 limited ucx", "pcie GPU 0 note rdma",
		"pcie nvme0 limited posix"}, states)
}
