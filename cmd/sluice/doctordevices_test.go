// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/cmd/sluice/internal/devicetree"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/cmd/sluice/internal/nvml"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakesysfs"
	"github.com/sluicehq/sluice/internal/topology"
)

// TestReportOfAServer: the tree of devices stands behind the checks, one of which is a slow link.
func TestReportOfAServer(t *testing.T) {
	kernel := topology.Sysfs(fakesysfs.Server(t).Root)
	tree := devicetree.Examine(kernel, func() (nvml.Findings, error) {
		return nvml.Findings{}, &driver.UnavailableError{Backend: "nvml", Reason: "not asked"}
	})
	s := machine.Source{Root: t.TempDir(), Known: deviceChecks(&tree),
		Backends: []machine.Backend{{Name: "tcp", Built: true}, {Name: "cuda", Built: true}}}
	r := machine.Examine(s)
	var out strings.Builder
	require.NoError(t, printReport(&out, &r, &tree))
	for _, want := range []string{
		`\nDEVICES \(NVML: not asked\)\nNUMA node 0\n  root complex pci0000:16\n`,
		`\nnear GPU 0: NIC mlx5_0 \(same switch\); drive nvme0 \(same switch\)\n`,
		`\npcie GPU 1 +limited +GPU 1 runs at Gen3 x8 of Gen5 x16\n`,
		`\n  pcie mlx5_1 \(tcp, ucx, rdma\): .*\n +move it to a slot of Gen5 x16`,
		`\ntcp +limited .*pcie mlx5_1: mlx5_1 runs at Gen4 x16 of Gen5 x16`,
	} {
		require.Regexp(t, want, out.String())
	}
}

// TestDeviceChecks lets nothing count against a backend that idleness may explain.
func TestDeviceChecks(t *testing.T) {
	checks := deviceChecks(&devicetree.Report{
		GPUs: []*devicetree.Device{{Kind: "gpu", Name: "GPU 0",
			Warnings: []devicetree.Warning{{Text: "slow", Fix: "later", Idle: true}}}},
		Rest: []*devicetree.Device{{Kind: "drive", Name: "nvme0",
			Warnings: []devicetree.Warning{{Text: "slow", Fix: "move"}}},
			{Kind: "nic", Name: "mlx5_0"}},
		Slow: []*devicetree.Branch{{Name: "0000:17:00.0",
			Warnings: []devicetree.Warning{{Text: "narrow", Fix: "cable"}}}},
	})
	var states []string
	for _, c := range checks {
		states = append(states, c.Name+" "+string(c.State)+" "+c.Backends[0])
	}
	if got, want := strings.Join(states, "; "), "pcie GPU 0 note rdma; pcie nvme0 limited posix; "+
		"pcie 0000:17:00.0 limited ucx"; got != want {
		t.Errorf("checks %q, want %q", got, want)
	}
	if checks[0].State != machine.Note || checks[1].Fix != "move" {
		t.Errorf("%+v", checks)
	}
}
