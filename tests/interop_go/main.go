// The official client for Go against a server: one scenario after the other, as lines on stdin name
// them.
//
// A line is a scenario and its arguments. The answer is PASS, or FAIL and why; before it, ASK and the
// name of something that only who runs the server can do, which DONE on stdin answers.
package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
)

var scenarios = map[string]func(*stage){
	// messages
	"batches":     batches,
	"chunks":      chunks,
	"schemas":     schemas,
	"plain-bytes": plainBytes,
	"partitioned": partitioned,
	"access":      access,
	"table-view":  tableView,
	// schemas
	"schema-rules":  schemaRules,
	"schema-native": schemaNative,
	"schema-admin":  schemaAdmin,
	// consumers
	"exclusive":       exclusive,
	"shared":          shared,
	"failover":        failover,
	"key-shared":      keyShared,
	"sticky":          sticky,
	"acks":            acks,
	"redelivery":      redelivery,
	"dead-letter":     deadLetter,
	"pattern":         pattern,
	"pattern-early":   patternEarly,
	"reader":          reader,
	"seek":            seek,
	"admin":           adminClient,
	"over-http":       overHTTP,
	"restart-produce": restartProduce,
	// policies
	"delays":          delays,
	"expiry":          expiry,
	"quota-hold":      quotaHold,
	"quota-exception": quotaException,
	"quota-eviction":  quotaEviction,
	"limits":          limits,
	"subscribe-rate":  subscribeRate,
	"message-size":    messageSize,
	"encryption":      encryption,
	// transactions
	"txn-commit":     txnCommit,
	"txn-abort":      txnAbort,
	"txn-acks":       txnAcks,
	"txn-indexes":    txnBatchIndexes,
	"txn-two-topics": txnTwoTopics,
	"txn-ended":      txnEnded,
	"txn-left-over":  txnLeftOver,
	"txn-over-http":  txnOverHTTP,
	"restart-txn":    restartTxn,
}

// A failed is what a scenario panics with when an expectation does not hold.
type failed string

func main() {
	serviceURL, adminURL := os.Args[1], os.Args[2]
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		name := strings.Fields(lines.Text())[0]
		if problem := run(name, serviceURL, adminURL, lines); problem != "" {
			fmt.Println("FAIL", strings.ReplaceAll(problem, "\n", " | "))
			continue
		}
		fmt.Println("PASS")
	}
}

func run(name, serviceURL, adminURL string, lines *bufio.Scanner) (problem string) {
	s := &stage{name: name, serviceURL: serviceURL, adminURL: adminURL, lines: lines}
	defer func() {
		found := recover()
		if why, ok := found.(failed); ok {
			problem = string(why)
		} else if found != nil {
			problem = fmt.Sprintf("%v\n%s", found, debug.Stack())
		}
	}()
	defer s.close()
	scenarios[name](s)
	return ""
}
