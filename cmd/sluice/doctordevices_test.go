// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/cmd/sluice/internal/devicetree"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/internal/testing/fakesysfs"
)

// server makes a directory for --root that has a server's devices.
func server(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	if err := os.Symlink(fakesysfs.Server(t).Root, filepath.Join(root, "sys")); err != nil {
		t.Fatal(err)
	}
	return root
}

func TestDoctorDevices(t *testing.T) {
	o := sluice(t, "doctor", "--all", "--root", server(t))
	if o.status != 0 || o.stderr != "" {
		t.Fatalf("%+v", o)
	}
	for _, want := range []string{
		`\nDEVICES \(NVML: another machine's driver cannot be asked\)\nNUMA node 0\n  root complex pci0000:16\n`,
		`\n +drive nvme0, 0000:1b:00\.0, Made Drive 0, Gen4 x4\n`,
		`! GPU 1 runs at Gen3 x8 of Gen5 x16: check the slot`,
		`\nnear GPU 0: NIC mlx5_0 \(same switch\); drive nvme0 \(same switch\)\n`,
		`\npcie GPU 1 +limited +GPU 1 runs at Gen3 x8 of Gen5 x16\n`,
		`\n  pcie mlx5_1 \(tcp, ucx, rdma\): .*\n +move it to a slot of Gen5 x16`,
		`\nrdma .*pcie mlx5_1: mlx5_1 runs at Gen4 x16 of Gen5 x16`,
	} {
		if !regexp.MustCompile(want).MatchString(o.stdout) {
			t.Errorf("no %q in:\n%s", want, o.stdout)
		}
	}
}

func TestDoctorDevicesJSON(t *testing.T) {
	o := sluice(t, "doctor", "--json", "--root", server(t))
	if o.status != 0 || o.stderr != "" {
		t.Fatalf("%+v", o)
	}
	devices := decode(t, o.stdout).(map[string]any)["devices"].(map[string]any)
	wantKeys(t, "devices", devices, "nvidia", "nodes")
	wantKeys(t, "nvidia", devices["nvidia"], "driver", "nvml", "cuda", "unavailable", "fix",
		"missing")
	branch := devices["nodes"].([]any)[0].(map[string]any)
	var path []string
	for len(branch["devices"].([]any)) == 0 {
		path = append(path, branch["kind"].(string)+" "+branch["name"].(string))
		wantKeys(t, "branch", branch, "kind", "name", "link", "link_max", "warnings", "branches",
			"devices")
		branch = branch["branches"].([]any)[0].(map[string]any)
	}
	if got := strings.Join(path, ", "); got != "node 0, root pci0000:16, port 0000:16:01.0" ||
		branch["kind"] != "switch" {
		t.Errorf("the first device hangs on %s, and then a %v", got, branch["kind"])
	}
	gpu := branch["devices"].([]any)[0].(map[string]any)
	wantKeys(t, "device", gpu, "kind", "name", "address", "node", "path", "link", "link_max",
		"link_max_of_slot", "rdma", "netdevs",
		"virtual_functions", "names", "model", "gpu", "warnings", "nearest_nics", "nearest_drives")
	near := gpu["nearest_nics"].([]any)[0].(map[string]any)
	wantKeys(t, "neighbour", near, "name", "address", "nearness", "bridges", "nodes")
	if near["name"] != "mlx5_0" || near["nearness"] != "same switch" ||
		gpu["link"].(map[string]any)["gen"] != 5.0 {
		t.Errorf("%v, the nearest NIC is %v", gpu, near)
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
