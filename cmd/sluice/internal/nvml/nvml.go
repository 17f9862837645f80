// SPDX-License-Identifier: Apache-2.0

// Package nvml asks the NVIDIA driver, through NVML, which GPUs there are and by which link
// each of them is reached. The library is opened at run time.
package nvml

import (
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/topology"
)

// Library is the name that is opened where none is given.
const Library = "libnvidia-ml.so.1"

// Findings are what the driver tells.
type Findings struct {
	Driver string   `json:"driver"`  // its version, "550.54.15"
	NVML   string   `json:"nvml"`    // the library's version
	CUDA   string   `json:"cuda"`    // the newest that the driver serves, "12.4"
	GPUs   []GPU    `json:"gpus"`    // in NVML's order, which is that of PCI addresses
	Absent []string `json:"missing"` // what the driver did not say, and why
}

// GPU is one card. What the driver does not say is zero, and named in Absent.
type GPU struct {
	// as nvidia-smi numbers them; CUDA may number them otherwise
	Index       int    `json:"index"`
	Name        string `json:"name"`
	UUID        string `json:"uuid"`
	Bus         string `json:"bus"`     // of PCI, as the kernel spells it
	Node        int    `json:"node"`    // of NUMA; -1: not known
	Compute     string `json:"compute"` // the compute capability, "9.0"
	MemoryTotal uint64 `json:"memory_total"`
	MemoryFree  uint64 `json:"memory_free"`
	// "enabled", "disabled", "disabled, enabled after a reset"; empty: it has none
	MIG    string        `json:"mig"`
	Link   topology.Link `json:"link"` // as it is now
	Most   topology.Link `json:"link_max"`
	State  int           `json:"performance_state"` // 0: full clocks, to 15; -1: not known
	Absent []string      `json:"missing"`
}

const installFix = "install the NVIDIA driver; containers: --gpus all"

func unavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "nvml", Reason: reason, Fix: fix}
}
