// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/nvml"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/topology"
)

// cards answers as a driver would that shows cards at these addresses.
func cards(buses ...string) func() (nvml.Findings, error) {
	f := nvml.Findings{Driver: "550.54.15", CUDA: "12.4"}
	for i, bus := range buses {
		f.GPUs = append(f.GPUs, nvml.GPU{Index: i, Name: "Made GPU", Bus: bus, Compute: "9.0",
			Memory: 80 << 30})
	}
	return func() (nvml.Findings, error) { return f, nil }
}

func absent() (nvml.Findings, error) {
	return nvml.Findings{}, &driver.UnavailableError{Backend: "nvml", Reason: "not here",
		Fix: "install it"}
}

func printed(r *Devices) string {
	var text strings.Builder
	r.Print(&text)
	return text.String()
}

const server = `DEVICES (NVIDIA driver 550.54.15, CUDA 12.4)
GPU 0, Made GPU, 80 GiB, compute 9.0, 0000:19:00.0, NUMA node 0, Gen5 x16
  near: NIC mlx5_0 (same switch); drive nvme0 (same switch)
GPU 1, Made GPU, 80 GiB, compute 9.0, 0000:9b:00.0, NUMA node 1, Gen3 x8 of Gen5 x16
  near: NIC mlx5_1 (same NUMA node); drive nvme0, nvme1 (across NUMA nodes)
  ! GPU 1 runs at Gen3 x8 of Gen5 x16: check the slot: seat the card anew, look at risers and at how the firmware splits the slot
NIC mlx5_0 (eth2), 0000:1a:00.0, NUMA node 0, Gen5 x16
drive nvme0, 0000:1b:00.0, NUMA node 0, Made Drive 0, Gen4 x4
drive nvme1, 0000:1c:00.0, NUMA node 0, Made Drive 1, Gen4 x4
NIC mlx5_1 (ib0), 0000:ac:00.0, NUMA node 1, Gen4 x16 of Gen5 x16
  ! mlx5_1 runs at Gen4 x16 of Gen5 x16: move it to a slot of Gen5 x16: this one, 0000:ab:01.0, has Gen4 x16
`

// TestServer has a driver that shows all cards, one that is not there, whose cards are numbered by
// their addresses, and one that shows some and others that are on no bus.
func TestServer(t *testing.T) {
	kernel := topology.Sysfs(standin.ServerSysfs(t).Root)
	r := ExamineDevices(kernel, cards("0000:19:00.0", "0000:9b:00.0"))
	require.Equal(t, server, printed(&r))

	r = ExamineDevices(kernel, absent)
	require.Regexp(t, `^DEVICES \(NVML: not here; install it\)\nGPU 0, 0000:19:00.0, NUMA node 0, `+
		`Gen5 x16\n(.*\n)*GPU 1, 0000:9b:00.0, `, printed(&r))
	require.Equal(t, NVIDIA{Unavailable: "not here", Fix: "install it"}, r.NVIDIA)

	r = ExamineDevices(kernel, cards("0000:19:00.0", "", "0000:ff:00.0"))
	require.Regexp(t, `\nGPU 0, Made GPU.*\n.*\nGPU 0000:9b:00.0 \(not shown by the driver\), NUMA.*`+
		`\n(  .*\n)*GPU 1, Made GPU, 80 GiB, compute 9.0, link not known\n`+
		`  near: NIC mlx5_0, mlx5_1 \(not known\); .*\nGPU 2, .*0000:ff:00.0, link not known\n`,
		printed(&r))

	r = ExamineDevices(topology.Sysfs(t.TempDir()), func() (nvml.Findings, error) {
		return nvml.Findings{}, errors.New("torn")
	})
	require.Equal(t, "torn", r.NVIDIA.Unavailable)
	require.Equal(t, "DEVICES: no GPU, NIC or NVMe drive is on a PCI bus here.\n", printed(&r))
	text, err := json.Marshal(r)
	require.NoError(t, err)
	require.NotContains(t, string(text), "null")
}

func TestWarnings(t *testing.T) {
	link := func(gen, width int) topology.Link { return topology.Link{Gen: gen, Width: width} }
	for _, c := range []struct {
		name            string
		kind            topology.Kind
		state           int // of a GPU
		now, most, slot topology.Link
		fix             string // a part of it; empty: no warning
		idle            bool
	}{
		{"all is well", topology.GPU, 0, link(5, 16), link(5, 16), link(5, 16), "", false},
		{"nothing is known", topology.GPU, -1, link(0, 0), link(5, 16), link(5, 16), "", false},
		{"idle GPU", topology.GPU, 8, link(1, 16), link(5, 16), link(5, 16), "under load", true},
		{"GPU whose state is not known", topology.GPU, -1, link(1, 16), link(5, 16), link(0, 0),
			"under load", true},
		{"idle GPU with lanes missing", topology.GPU, 8, link(1, 8), link(5, 16), link(5, 16),
			"check the slot", false},
		{"GPU at full clocks", topology.GPU, 0, link(3, 16), link(5, 16), link(5, 16),
			"check the slot", false},
		{"slot of fewer lanes", topology.GPU, 8, link(5, 8), link(5, 16), link(5, 8),
			"move it to a slot of Gen5 x16", false},
		{"worse than a bad slot", topology.NIC, 0, link(3, 8), link(5, 16), link(4, 16),
			"check the slot", false},
		{"NICs do not idle", topology.NIC, 0, link(3, 16), link(4, 16), link(4, 16),
			"check the slot", false},
		{"wide slot of a drive", topology.Drive, 0, link(4, 4), link(4, 4), link(5, 16), "", false},
	} {
		d := Device{Kind: c.kind, Name: "it", Link: c.now, Most: c.most, Slot: c.slot}
		if c.kind == topology.GPU {
			d.GPU = &nvml.GPU{State: c.state}
		}
		d.warn(topology.Sysfs(""), nil)
		if c.fix == "" {
			require.Empty(t, d.Warnings, c.name)
			continue
		}
		require.Len(t, d.Warnings, 1, c.name)
		require.Contains(t, d.Warnings[0].Fix, c.fix, c.name)
		require.Equal(t, c.idle, d.Warnings[0].Idle, c.name)
	}
}

// TestSlowSwitch has a switch whose way to the processor is narrow, below another switch.
func TestSlowSwitch(t *testing.T) {
	f := standin.NewSysfs(t)
	const outer = "pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0"
	const inner = outer + "/0000:19:00.0"
	for _, d := range []standin.SysfsFunction{
		{Path: "pci0000:16/0000:16:01.0"}, {Path: "pci0000:16/0000:16:01.0/0000:17:00.0"},
		{Path: outer},
		{Path: inner, Speed: standin.Gen4, Most: standin.Gen4, Width: 8, Wide: 16},
		{Path: inner + "/0000:1a:00.0"}, {Path: inner + "/0000:1a:01.0"},
		{Path: inner + "/0000:1a:00.0/0000:1b:00.0", Class: "0x020000"},
		{Path: inner + "/0000:1a:01.0/0000:1c:00.0", Class: "0x020000"},
	} {
		f.Add(d)
	}
	f.Link("class/net/eth0/device", "devices/"+inner+"/0000:1a:00.0/0000:1b:00.0")
	f.Link("class/net/eth1/device", "devices/"+inner+"/0000:1a:01.0/0000:1c:00.0")
	r := ExamineDevices(topology.Sysfs(f.Root), absent)
	require.Equal(t, `DEVICES
NIC eth0, 0000:1b:00.0, NUMA node 0, link not known
  ! switch 0000:19:00.0 runs at Gen4 x8 of Gen4 x16 towards the processor: all below it share that: check its slot and cable, and what the firmware allows
NIC eth1, 0000:1c:00.0, NUMA node 0, link not known
`, printed(&r))
}
