package magnetar.interop;

import magnetar.interop.common.ScenarioOf;

/** One thing that must work through the official client for scalable topics. */
interface Scenario extends ScenarioOf<Server> {
}
