// SPDX-License-Identifier: Apache-2.0

package devicetree

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/cmd/sluice/internal/nvml"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakesysfs"
	"github.com/sluicehq/sluice/internal/topology"
)

// cards answers as one of the server's two cards would.
func cards(states ...int) func() (nvml.Findings, error) {
	return func() (nvml.Findings, error) {
		f := nvml.Findings{Driver: "550.54.15", CUDA: "12.4"}
		for i, bus := range []string{"0000:19:00.0", "0000:9b:00.0"}[:len(states)] {
			f.GPUs = append(f.GPUs, nvml.GPU{
				Index: i, Name: "Made GPU", Bus: bus, Node: i, Compute: "9.0",
				MemoryTotal: 80 << 30, State: states[i],
				Link: topology.Link{Gen: 5 - 2*i, Width: 16 - 8*i}, Most: topology.Link{Gen: 5,
					Width: 16},
			})
		}
		return f, nil
	}
}

func absent() (nvml.Findings, error) {
	return nvml.Findings{}, &driver.UnavailableError{Backend: "nvml", Reason: "not here",
		Fix: "install it"}
}

func printed(r *Report) string {
	var text strings.Builder
	r.Print(&text)
	return text.String()
}

const server = `DEVICES (NVIDIA driver 550.54.15, CUDA 12.4)
NUMA node 0
  root complex pci0000:16
    root port 0000:16:01.0, Gen5 x16
      switch 0000:17:00.0, Gen5 x16
        GPU 0, Made GPU, 80 GiB, compute 9.0, 0000:19:00.0, Gen5 x16
        NIC mlx5_0 (eth2), 0000:1a:00.0, Gen5 x16
        drive nvme0, 0000:1b:00.0, Made Drive 0, Gen4 x4
    root port 0000:16:05.0, Gen5 x4
      drive nvme1, 0000:1c:00.0, Made Drive 1, Gen4 x4
NUMA node 1
  root complex pci0000:9a
    root port 0000:9a:01.0, Gen5 x16
      GPU 1, Made GPU, 80 GiB, compute 9.0, 0000:9b:00.0, Gen3 x8 of Gen5 x16
        ! GPU 1 runs at Gen3 x8 of Gen5 x16: check the slot: seat the card anew, look at risers and at how the firmware splits the slot
  root complex pci0000:ab
    root port 0000:ab:01.0, Gen4 x16
      NIC mlx5_1 (ib0), 0000:ac:00.0, Gen4 x16 of Gen5 x16
        ! mlx5_1 runs at Gen4 x16 of Gen5 x16: move it to a slot of Gen5 x16: this one, 0000:ab:01.0, has Gen4 x16
near GPU 0: NIC mlx5_0 (same switch); drive nvme0 (same switch)
near GPU 1: NIC mlx5_1 (same NUMA node); drive nvme0, nvme1 (across NUMA nodes)
`

func TestServer(t *testing.T) {
	kernel := topology.Sysfs(fakesysfs.Server(t).Root)
	r := Examine(kernel, cards(0, 0))
	got := printed(&r)
	if got != server {
		t.Errorf("printed\n%s\nwant\n%s", got, server)
	}
	if len(r.GPUs) != 2 || len(r.Rest) != 4 || len(r.Slow) != 0 {
		t.Errorf("%d GPUs, %d others, %d slow switches", len(r.GPUs), len(r.Rest), len(r.Slow))
	}
}

// TestWithoutDriver numbers the cards by their addresses, and does not know whether they are idle.
func TestWithoutDriver(t *testing.T) {
	r := Examine(topology.Sysfs(fakesysfs.Server(t).Root), absent)
	got := printed(&r)
	for _, want := range []string{"DEVICES (NVML: not here; install it)\n",
		"  GPU 0, 0000:19:00.0, Gen5 x16\n", "GPU 1 runs at Gen3 x8 of Gen5 x16: check the slot"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
	if r.NVIDIA.Unavailable != "not here" || r.NVIDIA.Fix != "install it" {
		t.Errorf("%+v", r.NVIDIA)
	}
	plain := Examine(topology.Sysfs(t.TempDir()), func() (nvml.Findings, error) {
		return nvml.Findings{}, errors.New("torn")
	})
	if plain.NVIDIA.Unavailable != "torn" || printed(&plain) != "DEVICES: no GPU, NIC or NVMe "+
		"drive is on a PCI bus here.\n" {
		t.Errorf("%+v:\n%s", plain.NVIDIA, printed(&plain))
	}
}

// TestStrangers has a card that the driver does not show, and cards that are on no bus.
func TestStrangers(t *testing.T) {
	kernel := topology.Sysfs(fakesysfs.Server(t).Root)
	r := Examine(kernel, cards(0))
	if got := printed(&r); !strings.Contains(got, "GPU 0000:9b:00.0 (not shown by the driver), "+
		"Gen3 x8 of Gen5 x16\n") || len(r.GPUs) != 2 {
		t.Errorf("%d GPUs:\n%s", len(r.GPUs), got)
	}
	r = Examine(kernel, func() (nvml.Findings, error) {
		return nvml.Findings{GPUs: []nvml.GPU{{Index: 0, Node: -1}, {Index: 1, Node: -1},
			{Index: 2, Bus: "0000:ff:00.0", Node: 1, Name: "Far GPU"}}}, nil
	})
	var names []string
	for _, g := range r.GPUs {
		names = append(names, g.Name)
	}
	if want := []string{"GPU 0000:19:00.0", "GPU 0000:9b:00.0", "GPU 0", "GPU 1",
		"GPU 2"}; !slices.Equal(names, want) {
		t.Errorf("GPUs %v, want %v", names, want)
	}
	for _, want := range []string{"NUMA node 1\n  GPU 2, Far GPU, 0000:ff:00.0, link not known\n",
		"NUMA node not known\n  GPU 0, link not known\n",
		"near GPU 0: NIC mlx5_0, mlx5_1 (not known)"} {
		if got := printed(&r); !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
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
		list := d.warn()
		if c.fix == "" {
			if len(list) != 0 {
				t.Errorf("%s: %+v", c.name, list)
			}
			continue
		}
		if len(list) != 1 || !strings.Contains(list[0].Fix, c.fix) || list[0].Idle != c.idle {
			t.Errorf("%s: %+v, want %q", c.name, list, c.fix)
		}
	}
}

// TestSlowSwitch has a switch whose way to the processor is narrow, below another switch.
func TestSlowSwitch(t *testing.T) {
	f := fakesysfs.New(t)
	const outer = "pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0"
	const inner = outer + "/0000:19:00.0"
	for _, d := range []fakesysfs.Function{
		{Path: "pci0000:16/0000:16:01.0"}, {Path: "pci0000:16/0000:16:01.0/0000:17:00.0"},
		{Path: outer},
		{Path: inner, Speed: fakesysfs.Gen4, Most: fakesysfs.Gen4, Width: 8, Wide: 16},
		{Path: inner + "/0000:1a:00.0"}, {Path: inner + "/0000:1a:01.0"},
		{Path: inner + "/0000:1a:00.0/0000:1b:00.0", Class: "0x020000"},
		{Path: inner + "/0000:1a:01.0/0000:1c:00.0", Class: "0x020000"},
	} {
		f.Add(d)
	}
	f.Link("class/net/eth0/device", "devices/"+inner+"/0000:1a:00.0/0000:1b:00.0")
	f.Link("class/net/eth1/device", "devices/"+inner+"/0000:1a:01.0/0000:1c:00.0")
	const want = `DEVICES
NUMA node 0
  root complex pci0000:16
    root port 0000:16:01.0
      switch 0000:17:00.0
        switch 0000:19:00.0, Gen4 x8 of Gen4 x16
          ! switch 0000:19:00.0 runs at Gen4 x8 of Gen4 x16 towards the processor: all below it share that: check its slot and cable, and what the firmware allows
          NIC eth0, 0000:1b:00.0, link not known
          NIC eth1, 0000:1c:00.0, link not known
`
	r := Examine(topology.Sysfs(f.Root), absent)
	if got := printed(&r); got != want || len(r.Slow) != 1 {
		t.Errorf("%d slow switches, printed\n%s\nwant\n%s", len(r.Slow), got, want)
	}
}

// TestJSON wants lists where there may be many, never null.
func TestJSON(t *testing.T) {
	for _, r := range []Report{Examine(topology.Sysfs(fakesysfs.Server(t).Root), cards(0, 8)),
		Examine(topology.Sysfs(t.TempDir()), absent)} {
		text, err := json.Marshal(r)
		require.NoError(t, err)
		without := strings.ReplaceAll(string(text), `"gpu":null`, "")
		without = strings.ReplaceAll(without, `"missing":null}`, "") // of the cards made here
		if strings.Contains(without, "null") {
			t.Errorf("null in %s", text)
		}
	}
}
