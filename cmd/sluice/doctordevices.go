// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"path/filepath"

	"github.com/sluicehq/sluice/cmd/sluice/internal/devicetree"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/cmd/sluice/internal/nvml"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/topology"
)

// diagnosis is what doctor prints as JSON.
type diagnosis struct {
	machine.Report
	Devices devicetree.Report `json:"devices"`
}

// examineDevices looks at this machine's devices, or at those of another one's /sys below a
// directory, whose driver cannot be asked.
func examineDevices(root string) devicetree.Report {
	kernel := topology.Sysfs(filepath.Join("/", root, "sys"))
	return devicetree.Examine(kernel, func() (nvml.Findings, error) {
		if root != "" {
			return nvml.Findings{}, &driver.UnavailableError{Backend: "nvml",
				Reason: "another machine's driver cannot be asked"}
		}
		return nvml.Examine("")
	})
}

// deviceUsers are the backends that a slow link slows down.
var deviceUsers = map[topology.Kind][]string{
	topology.GPU: {rdmaName, "gds", "cuda"}, topology.NIC: {"tcp", ucxName, rdmaName},
	topology.Drive: {"posix", "gds"},
}

// deviceChecks says of each slow link what mends it.
func deviceChecks(r *devicetree.Report) (checks []machine.Check) {
	for _, d := range append(append([]*devicetree.Device{}, r.GPUs...), r.Rest...) {
		for _, w := range d.Warnings {
			checks = append(checks, deviceCheck("pcie "+d.Name, w, deviceUsers[d.Kind]))
		}
	}
	for _, b := range r.Slow {
		for _, w := range b.Warnings {
			checks = append(checks, deviceCheck("pcie "+b.Name, w, []string{ucxName, rdmaName,
				"gds", "cuda"}))
		}
	}
	return checks
}

func deviceCheck(name string, w devicetree.Warning, users []string) machine.Check {
	c := machine.Check{Name: name, State: machine.Limited, Found: w.Text,
		Why: "no transfer is faster than the link that it crosses", Fix: w.Fix, Backends: users}
	if w.Idle {
		c.State = machine.Note
	}
	return c
}

func printDevices(w io.Writer, r *devicetree.Report) error {
	var text bytes.Buffer
	fmt.Fprintln(&text)
	r.Print(&text)
	if _, err := w.Write(text.Bytes()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
